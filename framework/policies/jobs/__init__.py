"""Policies that give each of many training jobs its number of workers and parameter servers."""
