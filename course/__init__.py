"""What makes a course of the labs: exercises that answer, the learner's copy, reports, and what instructors need."""
