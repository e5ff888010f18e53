"""Row selection: which rows a branch selects, and how to gather and scatter them."""
