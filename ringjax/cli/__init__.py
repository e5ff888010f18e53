"""The command `ringjax`: know what a job will do before renting the machines. Each command is also a function."""
