"""The wire bytes of every message type, kept so that a change of the contract is seen."""
