"""The course around the labs: checked exercises, the learner's copy, reports, and tools for instructors."""
