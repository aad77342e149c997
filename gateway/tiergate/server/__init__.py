"""The aiohttp edge: it turns connections into calls on the engine and answers into bytes."""
