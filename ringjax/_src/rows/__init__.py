"""Row selections: which rows of its chunks a device selects in a branch, and how to read and write them."""
