"""The log on PostgreSQL 15 and later, for several machines.

The tables are in the schema `shardyard`. A batch of records is one row, as in the embedded log. Appends of a process
are written together, in one transaction that locks the rows of their partitions: so offsets have no gaps, and become
visible in their order. Readers that wait are woken by NOTIFY.
"""

from shardyard.log.postgresql.engine import PostgresqlLog

__all__ = ["PostgresqlLog"]
