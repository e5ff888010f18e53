"""Planning: where each branch runs, what it sends, computes and stores."""
