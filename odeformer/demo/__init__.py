"""`odeformer demo`: the whole story on real text in a few minutes."""

from odeformer.demo.plan import DemoPlan, demo_plan
from odeformer.demo.run import DemoResult, run_demo

__all__ = ["DemoPlan", "DemoResult", "demo_plan", "run_demo"]
