"""Extensions of Sphinx that docs/conf.py loads."""
