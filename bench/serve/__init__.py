"""Loads a server over HTTP as its clients would, and measures at the client."""
