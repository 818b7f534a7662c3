"""The exercises of each lab, as `course.check` finds them: their checks, and what those need."""
