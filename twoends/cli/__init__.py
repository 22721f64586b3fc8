"""The `twoends` command.

main.py      the table of commands, and the outermost edge where errors become exit codes
command.py   what a command is, and how words become its options
screen.py    everything that is drawn
live.py      what is seen while a run goes on
load.py      what `run` and `plan` need before any weight is read
others       one file per command
"""
