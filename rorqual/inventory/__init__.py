"""What a checkpoint of a config holds: every tensor by name, and how many parameters that makes. No torch in here."""
