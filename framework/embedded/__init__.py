"""A private Apache Mesos 1.11.0 on loopback, for those who have no cluster at hand."""

from framework.embedded.agents import private_agents
from framework.embedded.cluster import Agent, AgentSpec, EmbeddedCluster, local_resources

__all__ = ["Agent", "AgentSpec", "EmbeddedCluster", "local_resources", "private_agents"]
