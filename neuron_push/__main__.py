"""`python -m neuron_push` is the command `neuron-push`."""

from neuron_push.cli import main

main()
