"""What stands beside a forward: the command line and reports."""
