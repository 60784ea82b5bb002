"""The parts that both agents use: the calculator, and the grader."""
