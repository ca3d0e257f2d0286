"""What a run saw, on disk: every answer with its routes, advantages and log-probs; written while it trains, read to take it apart."""
