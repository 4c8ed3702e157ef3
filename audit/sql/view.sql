-- A view over the listed files of one table; `listed` says which runs a file belongs to: a run that
-- differs from another only in its regions lists the other's maps.
CREATE VIEW {table} AS
SELECT listed.run_id, {columns}
FROM read_parquet({paths}, filename = true, hive_partitioning = false, union_by_name = false) AS part
JOIN listed_{table} AS listed ON listed.path = part.filename;
