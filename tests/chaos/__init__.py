"""Jobs of mixed fate while workers, broker and store are killed; what they note themselves is the judge."""
