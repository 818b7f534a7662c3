"""Says where this is now."""

from lab_utils import MOVED

raise (SystemExit if __name__ == "__main__" else ImportError)(f"lab_utils.course is {MOVED['course']} now")
