"""Which of two settings is better: objective, SLO, paired comparison, and the rule that picks."""
