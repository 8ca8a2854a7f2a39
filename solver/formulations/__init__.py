"""Integer programs for the placement problem, each exact for the instances that it accepts.

`auto.choose` picks one for an instance.
"""
