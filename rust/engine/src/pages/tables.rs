//! Page tables of one sequence, and its position in the prefix tree.

use ferrule_kernels::kv::{PAGE_TOKENS, PageId};

use super::digest::Digest;
use super::prefix::ParentNode;
use super::{Namespace, NodeId, PageTokens};

/// Page tables of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct PageTables {
    /// Per group, the page of every `PAGE_TOKENS` positions.
    pub(super) tables: Vec<Vec<PageId>>,
    /// Per group, the number of leading entries that left the window and are [`super::PAGE_NONE`].
    pub(super) out_of_window: Vec<usize>,
    namespace: Namespace,
    /// Number of leading positions whose keys and values depend on the tokens alone.
    shareable: usize,
    /// Node of the last page that is in the tree, and the number of pages up to there.
    node: Option<NodeId>,
    cached_pages: usize,
    /// Digest of the cached pages on disk, and of the empty sequence, if there is a disk tier.
    digest: Option<Digest>,
    root: Option<Digest>,
    /// First node that this sequence inserted, and the digests that it wrote to disk.
    pub(super) first_cached: Option<NodeId>,
    pub(super) saved: Vec<Digest>,
}

impl PageTables {
    /// Creates empty tables.
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

    /// Returns the tables in the form that the model takes.
    pub fn tables(&self) -> &[Vec<PageId>] {
        &self.tables
    }

    /// Returns the page at `index` of each table, or [`super::PAGE_NONE`].
    pub fn pages_at(&self, index: usize) -> Vec<PageId> {
        self.tables.iter().map(|table| table.get(index).copied().unwrap_or(super::PAGE_NONE)).collect()
    }

    /// Returns the number of pages held in a group.
    pub fn held(&self, group: usize) -> usize {
        self.tables[group].len() - self.out_of_window[group]
    }

    /// Returns the number of pages in the tree.
    pub(super) fn cached_pages(&self) -> usize {
        self.cached_pages
    }

    /// Returns whether all full pages of the first `computed` tokens are in the tree.
    pub(super) fn is_cached_to(&self, computed: usize) -> bool {
        self.cached_pages == computed / PAGE_TOKENS
    }

    /// Returns the digest of the pages in the tree.
    pub(super) fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// Returns the parent node of the next page.
    pub(super) fn parent_node(&self) -> ParentNode {
        self.node.map_or_else(|| ParentNode::Root(self.namespace.clone()), ParentNode::Node)
    }

    /// Returns the tokens of the full pages within the first `limit` tokens that can be shared and are not in the tree
    /// yet.
    pub fn shareable_pages<'a>(
        &self,
        tokens: &'a [u32],
        limit: usize,
    ) -> impl Iterator<Item = &'a PageTokens> + use<'a> {
        let (pages, _) = tokens[..limit.min(self.shareable).min(tokens.len())].as_chunks::<PAGE_TOKENS>();
        pages.iter().skip(self.cached_pages)
    }

    /// Records that the next page is in the tree.
    pub(super) fn push_cached(&mut self, node: NodeId, tokens: &PageTokens) {
        self.node = Some(node);
        self.cached_pages += 1;
        self.digest = self.digest.map(|digest| digest.child(tokens));
    }

    /// Stops sharing later pages.
    pub(super) fn stop_sharing(&mut self) {
        self.shareable = 0;
    }

    /// Returns to the start of the sequence.
    pub(super) fn reset(&mut self) {
        (self.node, self.cached_pages, self.digest) = (None, 0, self.root);
    }
}
