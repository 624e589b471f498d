"""Scores and Gram matrices of an index by engines that others have made: Ray, Spark, or this process.

`engine` says what an engine is, holds the local one, and asks any of them; `ray` and `spark` are adapters.

May import `scores`, `store` and what is below them. Only the adapters import Ray and Spark. Start with `engine`.
"""
