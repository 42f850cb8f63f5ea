"""INIT: Task -> Episode. Creates and resets the environment on a host, and opens the conversation."""
