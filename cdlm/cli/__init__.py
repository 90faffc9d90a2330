"""The command line: one module for each command. Nothing else imports it, and help needs no torch."""
