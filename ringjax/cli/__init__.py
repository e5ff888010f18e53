"""The command `ringjax`: plans, draws, compiles, checks and tunes attention jobs. Each command is also a function."""
