//! The pages of one sequence, and how far the tree of kept pages knows them.

use ferrule_kernels::kv::{PAGE_TOKENS, PageId};

use super::digest::Digest;
use super::prefix::ParentNode;
use super::{Namespace, NodeId, PageTokens};

/// The pages of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct PageTables {
    /// For each group, the page of every `PAGE_TOKENS` positions.
    pub(super) tables: Vec<Vec<PageId>>,
    /// For each group, how many leading entries are [`super::PAGE_NONE`].
    pub(super) out_of_window: Vec<usize>,
    namespace: Namespace,
    /// Leading positions whose keys and values depend on the tokens so far and on nothing else.
    shareable: usize,
    /// The node of the last page that the tree knows, and how many pages end there.
    node: Option<NodeId>,
    cached_pages: usize,
    /// What names these pages on a disk, and what names none of them, where there is one.
    digest: Option<Digest>,
    root: Option<Digest>,
    /// The first node that is there because of this sequence, and what it handed over to the disk.
    pub(super) first_cached: Option<NodeId>,
    pub(super) saved: Vec<Digest>,
}

impl PageTables {
    /// Tables of a sequence that holds nothing.
    pub(super) fn new(groups: usize, namespace: Namespace, shareable: usize, root: Option<Digest>) -> Self {
        Self {
            tables: vec![Vec::new(); groups],
            out_of_window: vec![0; groups],
            namespace,
            shareable,
            node: None,
            cached_pages: 0,
            digest: root,
            root,
            first_cached: None,
            saved: Vec::new(),
        }
    }

    /// The tables as the model takes them.
    pub fn tables(&self) -> &[Vec<PageId>] {
        &self.tables
    }

    /// Pages held in a group.
    pub fn held(&self, group: usize) -> usize {
        self.tables[group].len() - self.out_of_window[group]
    }

    /// Pages that the tree knows.
    pub(super) fn cached_pages(&self) -> usize {
        self.cached_pages
    }

    /// Whether the tree knows all full pages of its `computed` tokens.
    pub(super) fn is_cached_to(&self, computed: usize) -> bool {
        self.cached_pages == computed / PAGE_TOKENS
    }

    /// What names the pages that the tree knows on a disk.
    pub(super) fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// Where the next page hangs in the tree.
    pub(super) fn parent_node(&self) -> ParentNode {
        self.node.map_or_else(|| ParentNode::Root(self.namespace.clone()), ParentNode::Node)
    }

    /// The tokens of the full pages within the first `most` that the tree may know and does not know yet.
    pub fn shareable_pages<'a>(
        &self,
        tokens: &'a [u32],
        limit: usize,
    ) -> impl Iterator<Item = &'a PageTokens> + use<'a> {
        let (pages, _) = tokens[..limit.min(self.shareable).min(tokens.len())].as_chunks::<PAGE_TOKENS>();
        pages.iter().skip(self.cached_pages)
    }

    /// Takes note that the tree knows one page more.
    pub(super) fn push_cached(&mut self, node: NodeId, tokens: &PageTokens) {
        self.node = Some(node);
        self.cached_pages += 1;
        self.digest = self.digest.map(|digest| digest.child(tokens));
    }

    /// Its later pages are its own affair.
    pub(super) fn stop_sharing(&mut self) {
        self.shareable = 0;
    }

    /// Begins at the first page again.
    pub(super) fn reset(&mut self) {
        (self.node, self.cached_pages, self.digest) = (None, 0, self.root);
    }
}
