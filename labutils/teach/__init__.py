"""How the course is taught: checks of exercises, figures, panels, the memory calculator. What is taught lies one folder up."""
