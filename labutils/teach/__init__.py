"""How the course is taught: checks, figures, panels, the calculator. What is taught lies above."""
