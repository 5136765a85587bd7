"""provision"""
