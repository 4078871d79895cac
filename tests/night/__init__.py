"""A night of an on-call engineer: eight faults, the alerts that fire, and the clicks to cause and mend."""
