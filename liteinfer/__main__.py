"""`python -m liteinfer` is the `liteinfer` command."""

from liteinfer.cli import main

main()
