//! NUMA node on which each thread of a pool runs.
//!
//! The system places a page of memory on the node that touches it first. A thread that stays on its node finds there
//! what it wrote, or read from a file. Each run divides its tasks in the same proportions, so about the same part of a
//! matrix falls to a node, unless a thread of another node has run out of tasks.

use std::ops::Range;

use super::affinity;

/// Nodes of a pool, each with some of its threads.
#[derive(Debug, Clone)]
pub struct Placement {
    threads: usize,
    /// Processors and number of the first thread of each node, in ascending order.
    nodes: Vec<(Vec<usize>, usize)>,
}

impl Placement {
    /// Divides `threads` among nodes, which are lists of processors, in proportion to their processors. If one node has
    /// enough processors for all threads, the system places them: nodes would wait for each other in each run.
    pub fn new(threads: usize, nodes: &[Vec<usize>]) -> Self {
        let mut placed = Vec::with_capacity(nodes.len());
        if nodes.iter().all(|node| node.len() < threads) {
            let processors = nodes.iter().map(Vec::len).sum::<usize>().max(1);
            let threads_of = |first_processors: usize| (first_processors * threads + processors / 2) / processors;
            let mut before = 0;
            for node in nodes {
                let first = threads_of(before);
                before += node.len();
                if first < threads_of(before) {
                    placed.push((node.clone(), first));
                }
            }
        }
        Self { threads, nodes: placed }
    }

    /// Returns the number of nodes; 1 if the threads may run anywhere.
    pub fn nodes(&self) -> usize {
        self.nodes.len().max(1)
    }

    /// Returns the node of a thread.
    pub fn node_of(&self, thread: usize) -> usize {
        self.nodes.partition_point(|(_, first)| *first <= thread).saturating_sub(1)
    }

    /// Returns the part of `0..tasks` that falls to the threads of a node.
    pub fn share(&self, tasks: usize, node: usize) -> Range<usize> {
        let edge = |node: usize| match self.nodes.get(node) {
            Some((_, first)) => tasks * first / self.threads,
            None if node == 0 => 0,
            None => tasks,
        };
        edge(node)..edge(node + 1)
    }

    /// Restricts the calling thread to the processors of the node of `thread`, if there are several nodes.
    pub fn pin(&self, thread: usize) {
        if self.nodes() > 1 {
            affinity::restrict(&self.nodes[self.node_of(thread)].0);
        }
    }
}
