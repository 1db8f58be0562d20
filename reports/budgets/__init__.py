"""The study's budgets: what each gave, in figures over budgets and in the order of the trials."""
