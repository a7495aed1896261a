"""A live board in a page, for the tests here."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect


class Board:
    """A live board in a cell's output."""

    def __init__(self, where: Locator | Page) -> None:
        self.el = where.locator(".ddpb").last
        self.rows = self.el.locator(".ddpb-row")
        self.finding = self.el.locator("section.ddpb-finding")
        self.answer = self.el.locator(".ddpb-answer").first
        self.panel = self.el.get_by_role("tabpanel")
        self.timeline = self.el.locator(".ddpb-canvas canvas")

    def press(self, name: str) -> None:
        """Press a button when it can be pressed."""
        button = self.el.locator(f'.ddpb-action[data-name={name}][aria-disabled="false"]')
        button.click()

    def tab(self, name: str) -> Locator:
        """The tab with this name."""
        return self.el.get_by_role("tab", name=name)

    def await_roles(self, *roles: str) -> None:
        """Wait until the rows say these words, each with its mark before it."""
        words = [re.compile(rf"^.{role}$") for role in roles]
        expect(self.el.locator(".ddpb-chip")).to_have_text(words)
