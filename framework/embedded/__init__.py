"""A private Apache Mesos 1.11.0 on loopback, for those who have no cluster at hand."""

from framework.embedded.agents import AgentSpec, private_agents
from framework.embedded.cluster import Agent, EmbeddedCluster
from framework.embedded.machine import local_resources

__all__ = ["Agent", "AgentSpec", "EmbeddedCluster", "local_resources", "private_agents"]
