//! How the work is cut into tasks. Nothing here changes a bit of the result.

use std::cmp::Reverse;
use std::ops::Range;

use super::record::{self, Line};
use super::{ATTENTION_BLOCK, AttentionSequence, AttentionShape};

/// Rows (queries times heads) of a task: enough to use each block of K and V several times while
/// it is in the cache, few enough to keep Q and the accumulators there too and to notice a cancellation soon.
const TASK_ROWS: usize = 64;

/// Tasks for each thread that work is cut into where it would otherwise leave threads idle.
const TASKS_PER_THREAD: usize = 4;

/// Bytes of records that tasks cut into spans may leave for merging; tasks beyond that stay whole.
pub(super) const PARTIAL_BYTES: usize = 16 << 20;

/// Rows of a sequence, of the heads that share some heads of K and V, over some blocks.
#[derive(Debug, Clone)]
pub(super) struct Task {
    pub(super) sequence: usize,
    /// One after the other in each block: they lie side by side in memory, which is read faster in longer runs.
    pub(super) kv_heads: Range<usize>,
    /// Rows of the sequence.
    pub(super) queries: Range<usize>,
    pub(super) blocks: Range<usize>,
}

impl Task {
    /// Rows: queries times heads.
    pub(super) fn rows(&self, shape: &AttentionShape<'_>) -> usize {
        self.kv_heads.len() * self.head_rows(shape)
    }

    /// Rows that share a head of K and V.
    pub(super) fn head_rows(&self, shape: &AttentionShape<'_>) -> usize {
        self.queries.len() * (shape.heads / shape.kv_heads)
    }

    /// Lines of the records of all blocks and rows.
    pub(super) fn partial_lines(&self, shape: &AttentionShape<'_>) -> usize {
        self.blocks.len() * self.rows(shape) * record::lines(shape.value_dim)
    }
}

/// Tasks for the pool.
#[derive(Debug)]
pub(super) struct Plan {
    /// First `spans` spans of tasks that were cut, those of one task next to each other; their records are merged
    /// later. Then whole tasks, in a stretch for each thread, the longest of a stretch first.
    pub(super) tasks: Vec<Task>,
    /// For each task that was cut: its spans in `tasks`.
    pub(super) splits: Vec<Range<usize>>,
    /// Lines of all spans' records.
    pub(super) partial_lines: usize,
    /// How many of `tasks` are spans.
    pub(super) spans: usize,
}

impl Plan {
    pub(super) fn new(shape: &AttentionShape<'_>, sequences: &[AttentionSequence<'_>], threads: usize) -> Self {
        let mut whole = whole_tasks(shape, sequences, threads);
        let cost = |task: &Task| task.blocks.len() * task.kv_heads.len() * task.head_rows(shape).div_ceil(8);
        // Long tasks first: short ones fill the gaps at the end.
        whole.sort_by_key(|task| Reverse(cost(task)));
        let total: usize = whole.iter().map(cost).sum();
        let share = total.div_ceil(threads * TASKS_PER_THREAD).max(1);

        let mut plan = Self { tasks: Vec::new(), splits: Vec::new(), partial_lines: 0, spans: 0 };
        let mut rest = Vec::new();
        for task in whole {
            let lines = task.partial_lines(shape);
            let too_many = (plan.partial_lines + lines) * size_of::<Line>() > PARTIAL_BYTES;
            if threads == 1 || task.blocks.len() == 1 || cost(&task) <= share || too_many {
                rest.push(task);
                continue;
            }
            let first = plan.tasks.len();
            let blocks = (share / (cost(&task) / task.blocks.len())).max(1);
            for start in task.blocks.clone().step_by(blocks) {
                let blocks = start..task.blocks.end.min(start + blocks);
                plan.tasks.push(Task { blocks, ..task.clone() });
            }
            plan.splits.push(first..plan.tasks.len());
            plan.partial_lines += lines;
        }
        plan.spans = plan.tasks.len();
        // Each thread begins with a stretch of its own: dealt like cards, every stretch has long ones, and first.
        plan.tasks.extend((0..threads).flat_map(|thread| rest.iter().skip(thread).step_by(threads)).cloned());
        plan
    }
}

fn whole_tasks(shape: &AttentionShape<'_>, sequences: &[AttentionSequence<'_>], threads: usize) -> Vec<Task> {
    let group = shape.heads / shape.kv_heads;
    let queries_per_task = (TASK_ROWS / group).max(1);
    let mut tasks = Vec::new();
    for (sequence, rows) in sequences.iter().enumerate() {
        for first in (0..rows.rows).step_by(queries_per_task) {
            let queries = first..rows.rows.min(first + queries_per_task);
            let start = shape.visible(rows, queries.start).start;
            let end = shape.visible(rows, queries.end - 1).end;
            let blocks = start / ATTENTION_BLOCK..end.div_ceil(ATTENTION_BLOCK);
            // Heads stay together where blocks alone are enough to share out.
            let together =
                if blocks.len() < threads * TASKS_PER_THREAD { 1 } else { TASK_ROWS / (group * queries.len()) };
            for head in (0..shape.kv_heads).step_by(together.max(1)) {
                tasks.push(Task {
                    sequence,
                    kv_heads: head..shape.kv_heads.min(head + together.max(1)),
                    queries: queries.clone(),
                    blocks: blocks.clone(),
                });
            }
        }
    }
    tasks
}
