"""What Rollmill promises, as sentences that run; `unit` mirrors the source folders, `golden` holds the wire bytes."""
