"""The user's project: what travels to the agents, what is begun there, what its script says of itself."""
