"""The work that both adapters share: a job begins, is judged, and its decision is carried out."""
