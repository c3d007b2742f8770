"""One run: opened, looped over, observed, stopped and resumed."""
