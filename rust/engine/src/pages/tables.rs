//! The pages of one sequence, and how far the tree of kept pages knows them.

use ferrule_kernels::kv::{PAGE_TOKENS, PageId};

use super::prefix::Place;
use super::{Namespace, NodeId, PageTokens};

/// The pages of one sequence.
#[derive(Debug)]
pub(crate) struct PageTables {
    /// For each group, the page of every `PAGE_TOKENS` positions.
    pub(super) tables: Vec<Vec<PageId>>,
    /// For each group, how many leading entries are [`super::PAGE_NONE`].
    pub(super) passed: Vec<usize>,
    namespace: Namespace,
    /// Leading positions whose keys and values depend on the tokens so far and on nothing else.
    shareable: usize,
    /// The node of the last page that the tree knows, and how many pages end there.
    node: Option<NodeId>,
    followed: usize,
    /// The first node that is there because of this sequence.
    pub(super) first_kept: Option<NodeId>,
}

impl PageTables {
    /// Tables of a sequence that holds nothing.
    pub(super) fn new(groups: usize, namespace: Namespace, shareable: usize) -> Self {
        Self {
            tables: vec![Vec::new(); groups],
            passed: vec![0; groups],
            namespace,
            shareable,
            node: None,
            followed: 0,
            first_kept: None,
        }
    }

    /// The tables as the model takes them.
    pub fn tables(&self) -> &[Vec<PageId>] {
        &self.tables
    }

    /// Pages held in a group.
    pub fn held(&self, group: usize) -> usize {
        self.tables[group].len() - self.passed[group]
    }

    /// Pages that the tree knows.
    pub(super) fn followed(&self) -> usize {
        self.followed
    }

    /// Where the next page hangs in the tree.
    pub(super) fn place(&self) -> Place {
        self.node.map_or_else(|| Place::First(self.namespace.clone()), Place::After)
    }

    /// The tokens of the full pages within the first `most` that the tree may know and does not know yet.
    pub(super) fn shareable_pages<'a>(
        &self,
        tokens: &'a [u32],
        most: usize,
    ) -> impl Iterator<Item = &'a PageTokens> + use<'a> {
        let (pages, _) = tokens[..most.min(self.shareable).min(tokens.len())].as_chunks::<PAGE_TOKENS>();
        pages.iter().skip(self.followed)
    }

    /// Takes note that the tree knows the first `pages` pages, the last of them as `node`.
    pub(super) fn follow(&mut self, node: NodeId, pages: usize) {
        (self.node, self.followed) = (Some(node), pages);
    }

    /// Its later pages are its own affair.
    pub(super) fn stop_sharing(&mut self) {
        self.shareable = 0;
    }

    /// Begins at the first page again.
    pub(super) fn start_over(&mut self) {
        (self.node, self.followed) = (None, 0);
    }
}
