"""TODO-opening"""
