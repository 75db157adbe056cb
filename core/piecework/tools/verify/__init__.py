"""Find out where a compiled model departs from eager: the first piece, then the first op."""
