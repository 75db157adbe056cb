"""``python -m piecework bench``: what a forward costs on the host, beside other ways to run the same model."""
