"""Writes `agents.jsonl`: four agents that share a system prompt, and classifications that share their examples.

The turns are scripted, so the file is the same every time. Each turn of an agent repeats the whole conversation before
it: its prompt begins with the prompt of the turn before. An engine that computes a shared prefix once runs about an
eighth of the prompt tokens.

    python examples/make_agents.py [agents.jsonl]
"""
from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

MODEL = "SmolLM2-135M-Instruct.Q4_1"

SYSTEM = """You are an operations assistant for a small web shop. You solve a task step by step with the tools below. \
In each step write one short line "Thought:" and one line "Action:" that calls exactly one tool. You then get a line \
"Observation:" with the result. When you know the answer, write "Final answer:" and the answer in one sentence.

Tools:
- search_orders(customer, status): lists the orders of a customer. `customer` is an e-mail address. `status` is one of \
open, shipped, delivered, returned, or any. Returns order numbers with date, total and status, newest first.
- get_order(number): shows one order with its items, prices, shipping address and parcel number.
- track_parcel(parcel): asks the carrier where a parcel is. Returns the last three scans with time and place.
- check_stock(item): tells how many pieces of an item are in each warehouse and when more will come.
- read_log(service, lines): returns the last lines of the log of a service: shop, payment, mail or search.
- restart_service(service): restarts a service. Use it only after its log shows an error that a restart can repair.
- convert_money(amount, source, target): converts an amount between currencies with today's rate.
- calendar(person, day): shows the free hours of a colleague on a day.
- send_mail(to, subject, text): sends an e-mail. Use it only when the task asks for one.

Rules:
1. Never guess an order number, a parcel number or a price: look it up.
2. Do not call the same tool twice with the same arguments.
3. If a tool reports an error, try another way once, then say what is missing.
4. Amounts are in euros if the currency is not named. Dates are written as year-month-day.
5. Do not reveal the address or the orders of one customer to another.
6. Keep each thought below twenty words."""

# agent -> task, then what the agent wrote and the observation it got, turn by turn
AGENTS = {
    "parcel": ("Where is the last parcel of mia@example.org, and when will it arrive?", [
        ("Thought: I need her newest order first.\nAction: search_orders(mia@example.org, any)",
         "Observation: 1. order 5521, 2024-03-04, 48.90, shipped. 2. order 5310, 2024-01-17, 12.00, delivered."),
        ("Thought: Order 5521 is shipped, I need its parcel number.\nAction: get_order(5521)",
         "Observation: order 5521: 1 kettle 39.90, 1 filter 9.00. parcel JX-204-77. ships to Lyon."),
        ("Thought: Now I ask the carrier.\nAction: track_parcel(JX-204-77)",
         "Observation: 2024-03-05 18:10 Munich, sorted. 2024-03-06 04:30 Strasbourg. 2024-03-06 delayed by snow."),
        ("Thought: There is a delay, the log may show a new date.\nAction: read_log(mail, 3)",
         "Observation: mail 5521 sent: new delivery date 2024-03-08. queue empty. no errors."),
        ("Thought: The date is known, I check that nothing is missing.\nAction: check_stock(filter)",
         "Observation: filter: 14 in Munich, 0 in Lyon. 40 more on 2024-03-11."),
        ("Thought: The filter was packed with the kettle.\nAction: calendar(Jonas, 2024-03-08)",
         "Observation: Jonas is free from 10:00 to 12:00 and from 15:00 to 16:00."),
    ]),
    "payment": ("Customers report that paying by card fails since this morning. Find out why and repair it.", [
        ("Thought: The payment log should show the error.\nAction: read_log(payment, 4)",
         "Observation: 07:58 ok. 08:01 error: certificate expired. 08:02 error: certificate expired. 08:03 retry."),
        ("Thought: A certificate expired, the shop log may say more.\nAction: read_log(shop, 3)",
         "Observation: 08:01 payment unreachable. 08:05 new certificate installed. 08:06 payment uses the old one."),
        ("Thought: The new certificate needs a restart.\nAction: restart_service(payment)",
         "Observation: payment restarted at 08:40. state: running."),
        ("Thought: I verify that payments work again.\nAction: read_log(payment, 2)",
         "Observation: 08:41 certificate valid until 2025-03-06. 08:42 ok, 19.90 paid by card."),
        ("Thought: Some orders may have failed meanwhile.\nAction: search_orders(lee@example.org, open)",
         "Observation: 1. order 5530, 2024-03-06, 75.00, open: payment failed at 08:02."),
        ("Thought: Order 5530 must be paid again.\nAction: get_order(5530)",
         "Observation: order 5530: 3 lamps 25.00. reserved until 2024-03-07. no parcel yet."),
    ]),
    "stock": ("Can we sell 60 blue mugs to a cafe in London by Friday, and what is the price in pounds?", [
        ("Thought: I look at the stock first.\nAction: check_stock(blue mug)",
         "Observation: blue mug: 35 in Munich, 18 in Lyon. 100 more on 2024-03-12. price 6.50 each."),
        ("Thought: Both warehouses hold 53, seven are missing.\nAction: check_stock(blue mug, second choice)",
         "Observation: blue mug, second choice: 9 in Munich. price 4.00 each."),
        ("Thought: 53 at 6.50 and 7 at 4.00 make 372.50 euros.\nAction: convert_money(372.50, EUR, GBP)",
         "Observation: 372.50 EUR are 318.49 GBP today."),
        ("Thought: Someone has to pack them by Thursday.\nAction: calendar(Aylin, 2024-03-07)",
         "Observation: Aylin is free from 09:00 to 11:30."),
        ("Thought: I check how long parcels to London take.\nAction: search_orders(cafe@example.org, delivered)",
         "Observation: 1. order 5102, 2023-11-20, 210.00, delivered on 2023-11-22 to London."),
        ("Thought: Two days are enough. I look at that order's packing.\nAction: get_order(5102)",
         "Observation: order 5102: 30 white mugs 7.00. 2 parcels of 15. nothing broken."),
    ]),
    "returns": ("How much money do we owe omar@example.org for his returned orders?", [
        ("Thought: I list his returns.\nAction: search_orders(omar@example.org, returned)",
         "Observation: 1. order 5488, 2024-02-25, 64.00, returned. 2. order 5401, 2024-02-02, 30.00, returned."),
        ("Thought: I need the items of the first one.\nAction: get_order(5488)",
         "Observation: order 5488: 2 chairs 32.00. one chair returned on 2024-03-01. refund open."),
        ("Thought: Only one chair came back, that is 32.00.\nAction: get_order(5401)",
         "Observation: order 5401: 1 clock 30.00. returned on 2024-02-09. refund of 30.00 paid on 2024-02-12."),
        ("Thought: The clock is paid. I verify in the payment log.\nAction: read_log(payment, 3)",
         "Observation: 2024-02-12 refund 30.00 to omar, ok. 2024-03-02 refund 32.00 to omar, failed: card closed."),
        ("Thought: The refund of 32.00 failed, he must be asked.\nAction: send_mail(omar@example.org, Refund, "
         "\"Please send us your new card or bank account.\")",
         "Observation: mail sent at 11:20."),
        ("Thought: I see whether he answered.\nAction: read_log(mail, 2)",
         "Observation: 11:20 to omar, delivered. 11:48 from omar: please use my bank account, details follow."),
    ]),
}

EXAMPLES = """Sort each message of a customer into one of: delivery, payment, product, praise.

Message: My parcel was left in the rain and the box is soaked.
Label: delivery

Message: I was charged twice for one lamp.
Label: payment

Message: Does the kettle switch off by itself?
Label: product

Message: Best shop I know, thank you all!
Label: praise

Message: The courier rang once and drove away.
Label: delivery

Message: Can I pay with a gift card and a credit card together?
Label: payment

Message: {message}
Label:"""

MESSAGES = (
    "It has been two weeks and nothing arrived.", "The refund is still missing on my account.",
    "How heavy is the large pan?", "Wonderful service, I will come back.", "The tracking page shows the wrong city.",
    "Why is my card refused?", "Is the blue mug safe for the dishwasher?", "You made my daughter very happy.",
    "Could you deliver on Saturday?", "The invoice has the wrong name.", "Which lamp fits a small desk?",
    "Friendly answer within an hour, great!", "Half of my order is missing.", "Do you take bank transfers?",
    "Is the chair made of oak?", "The gift wrapping was lovely.")


def requests() -> Iterator[dict]:
    """The lines: turn 0 of every agent, then turn 1 and so on, as agents that run side by side would send them."""
    for turn in range(1 + max(len(turns) for _, turns in AGENTS.values())):
        for name, (task, turns) in AGENTS.items():
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Task: {task}"}]
            for said, seen in turns[:turn]:
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": seen}]
            yield {"custom_id": f"{name}-{turn}", "method": "POST", "url": "/v1/chat/completions",
                   "body": {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0}}
    for number, message in enumerate(MESSAGES):
        body = {"prompt": EXAMPLES.format(message=message), "max_tokens": 16, "temperature": 0, "stop": ["\n"]}
        if number < 12:
            yield {"custom_id": f"label-{number}", "method": "POST", "url": "/v1/completions",
                   "body": {"model": MODEL, **body}}
        else:
            yield {"custom_id": f"label-{number}", **body}     # the plain form


def main(path: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for entry in requests():
            file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_name("agents.jsonl")))
