"""Jobs of mixed fate while workers, broker and store are killed; the jobs' own notes are the judge."""
