"""The engines liteinfer is measured against: each in a process and an environment of its own, under the same loop."""
