//! Partitioning of attention into tasks. It has no effect on result bits.

use std::cmp::Reverse;
use std::ops::Range;

use super::softmax_state::{self, Line};
use super::{ATTENTION_BLOCK, AttentionSequence, AttentionShape};

/// Number of rows (queries times heads) of a task: enough to reuse each block of K and V while it is cached, few enough
/// to keep Q and the accumulators cached and to react to cancellation quickly.
const TASK_ROWS: usize = 64;

/// Number of tasks per thread that long tasks are split into, so that no thread is idle.
const TASKS_PER_THREAD: usize = 4;

/// Maximum bytes of softmax states that split tasks keep for merging. Tasks beyond it are not split.
pub(super) const PARTIAL_BYTES: usize = 16 << 20;

/// Unit of parallel work: queries of a sequence, for some heads of K and V, over a range of KV blocks.
#[derive(Debug, Clone)]
pub(super) struct Task {
    pub(super) sequence: usize,
    /// Heads of K and V, processed in order within each block: they are contiguous in memory, and longer contiguous
    /// reads are faster.
    pub(super) kv_heads: Range<usize>,
    /// Rows of the sequence.
    pub(super) queries: Range<usize>,
    pub(super) blocks: Range<usize>,
}

impl Task {
    /// Returns the number of rows: queries times heads.
    pub(super) fn rows(&self, shape: &AttentionShape<'_>) -> usize {
        self.kv_heads.len() * self.head_rows(shape)
    }

    /// Returns the number of rows that share a head of K and V.
    pub(super) fn head_rows(&self, shape: &AttentionShape<'_>) -> usize {
        self.queries.len() * (shape.heads / shape.kv_heads)
    }

    /// Returns the number of lines of the softmax states of all blocks and rows.
    pub(super) fn partial_lines(&self, shape: &AttentionShape<'_>) -> usize {
        self.blocks.len() * self.rows(shape) * softmax_state::lines(shape.value_dim)
    }
}

/// Tasks of a call. Long tasks are split over KV blocks (split-KV, as in flash decoding).
#[derive(Debug)]
pub(super) struct Plan {
    /// The first `spans` tasks are spans of split tasks, grouped by task; their softmax states are merged afterwards.
    /// Whole tasks follow, in one contiguous range per thread, each range sorted by descending cost.
    pub(super) tasks: Vec<Task>,
    /// Indices in `tasks` of the spans of each split task.
    pub(super) splits: Vec<Range<usize>>,
    /// Number of lines of the softmax states of all spans.
    pub(super) partial_lines: usize,
    /// Number of spans in `tasks`.
    pub(super) spans: usize,
}

impl Plan {
    pub(super) fn new(shape: &AttentionShape<'_>, sequences: &[AttentionSequence<'_>], threads: usize) -> Self {
        let mut whole = whole_tasks(shape, sequences, threads);
        let cost = |task: &Task| task.blocks.len() * task.kv_heads.len() * task.head_rows(shape).div_ceil(8);
        // Longest tasks first, so that short ones balance the load at the end.
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
        // Each thread starts with its own range of tasks. Round-robin gives every range long tasks, in descending order.
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
            // A task has several heads only if there are enough blocks for all threads.
            let task_heads =
                if blocks.len() < threads * TASKS_PER_THREAD { 1 } else { TASK_ROWS / (group * queries.len()) };
            for head in (0..shape.kv_heads).step_by(task_heads.max(1)) {
                tasks.push(Task {
                    sequence,
                    kv_heads: head..shape.kv_heads.min(head + task_heads.max(1)),
                    queries: queries.clone(),
                    blocks: blocks.clone(),
                });
            }
        }
    }
    tasks
}
