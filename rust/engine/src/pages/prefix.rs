//! Prefix tree: an index of cached pages by their tokens, a radix tree with one page of tokens per edge.
//!
//! A node stands for all tokens from the start of a sequence to the end of one page. It is looked up by its parent and
//! its tokens, compared one by one, so there are no hash collisions. Namespaces are separate.
//!
//! A node has one page per group of layers. In a group without window a page is useless without the pages before it, so
//! evicting it removes the node and its descendants. Groups with a window lose pages one by one; the node stays, and
//! sequences can still be continued where a window is complete.

use std::collections::HashMap;
use std::sync::Arc;

use ferrule_kernels::kv::{PAGE_TOKENS, PageId};
use ferrule_model::Adapter;

use super::PAGE_NONE;

/// The tokens of a page.
pub(crate) type PageTokens = [u32; PAGE_TOKENS];

/// Separates requests that must not share pages although their tokens are equal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Namespace {
    /// Cache salt, for example of a tenant.
    pub salt: Option<Arc<str>>,
    /// Fingerprint of the adapter.
    pub adapter: Option<[u8; 32]>,
}

impl Namespace {
    /// Creates the namespace of a salt and an adapter.
    pub fn new(salt: Option<Arc<str>>, adapter: Option<&Adapter>) -> Self {
        Self { salt, adapter: adapter.map(|adapter| *adapter.fingerprint()) }
    }
}

/// Id of a node; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(u64);

/// Parent of a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum ParentNode {
    /// The node is the first page of a sequence in a namespace.
    Root(Namespace),
    /// The node follows another node.
    Node(NodeId),
}

#[derive(Debug)]
struct Node {
    parent: ParentNode,
    tokens: PageTokens,
    /// Page per group, or [`PAGE_NONE`].
    pages: Vec<PageId>,
    children: Vec<NodeId>,
}

/// A page of a group: (group, page).
pub(crate) type GroupPage = (usize, PageId);

/// Prefix tree over cached pages.
#[derive(Debug, Default)]
pub(crate) struct PrefixTree {
    nodes: HashMap<NodeId, Node>,
    by_tokens: HashMap<(ParentNode, PageTokens), NodeId>,
    /// Node of every cached page.
    by_page: HashMap<GroupPage, NodeId>,
    next: u64,
}

impl PrefixTree {
    /// Returns the node of these tokens under a parent.
    pub fn find(&self, parent: ParentNode, tokens: &PageTokens) -> Option<NodeId> {
        self.by_tokens.get(&(parent, *tokens)).copied()
    }

    /// Returns whether a node exists.
    pub fn contains(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    /// Returns the pages of a node, one per group or [`PAGE_NONE`].
    pub fn pages(&self, node: NodeId) -> &[PageId] {
        &self.nodes[&node].pages
    }

    /// Inserts pages under their tokens. Returns `None` if the parent node was evicted.
    ///
    /// # Panics
    /// If the parent already has a node of these tokens.
    pub fn insert(&mut self, parent: ParentNode, tokens: &PageTokens, pages: &[PageId]) -> Option<NodeId> {
        let id = NodeId(self.next);
        if let ParentNode::Node(parent) = parent {
            self.nodes.get_mut(&parent)?.children.push(id);
        }
        self.next += 1;
        let previous = self.by_tokens.insert((parent.clone(), *tokens), id);
        assert!(previous.is_none(), "the tokens already have a node");
        self.nodes.insert(id, Node { parent, tokens: *tokens, pages: vec![PAGE_NONE; pages.len()], children: vec![] });
        for (group, &page) in pages.iter().enumerate().filter(|&(_, &page)| page != PAGE_NONE) {
            self.set_page(id, group, page);
        }
        Some(id)
    }

    /// Sets a node's page of a group.
    ///
    /// # Panics
    /// If the node does not exist.
    pub fn set_page(&mut self, node: NodeId, group: usize, page: PageId) {
        self.nodes.get_mut(&node).expect("the node exists").pages[group] = page;
        self.by_page.insert((group, page), node);
    }

    /// Removes a page, and with `with_descendants` its node and all descendants. Returns the other pages removed with
    /// it.
    pub fn remove_page(&mut self, page: GroupPage, with_descendants: bool) -> Vec<GroupPage> {
        let Some(id) = self.by_page.remove(&page) else { return Vec::new() };
        let node = self.nodes.get_mut(&id).expect("a cached page has a node");
        node.pages[page.0] = PAGE_NONE;
        if with_descendants {
            return self.remove(id);
        }
        self.prune(id);
        Vec::new()
    }

    /// Removes a node and its descendants. Returns their pages.
    pub fn remove(&mut self, id: NodeId) -> Vec<GroupPage> {
        let mut pages = Vec::new();
        let mut stack = vec![id];
        let parent = self.nodes.get(&id).map(|node| node.parent.clone());
        while let Some(id) = stack.pop() {
            let Some(node) = self.nodes.remove(&id) else { continue };
            self.by_tokens.remove(&(node.parent, node.tokens));
            stack.extend(node.children);
            pages.extend(node.pages.into_iter().enumerate().filter(|&(_, page)| page != PAGE_NONE));
        }
        for page in &pages {
            self.by_page.remove(page);
        }
        if let Some(ParentNode::Node(parent)) = parent {
            if let Some(node) = self.nodes.get_mut(&parent) {
                node.children.retain(|&child| child != id);
            }
            self.prune(parent);
        }
        pages
    }

    /// Removes a node without pages and children, then its ancestors likewise.
    pub fn prune(&mut self, mut id: NodeId) {
        while let Some(node) = self.nodes.get(&id) {
            if !node.children.is_empty() || node.pages.iter().any(|&page| page != PAGE_NONE) {
                return;
            }
            let parent = node.parent.clone();
            self.by_tokens.remove(&(parent.clone(), node.tokens));
            self.nodes.remove(&id);
            let ParentNode::Node(parent) = parent else { return };
            if let Some(node) = self.nodes.get_mut(&parent) {
                node.children.retain(|&child| child != id);
            }
            id = parent;
        }
    }

    /// Returns all cached pages.
    pub fn all_pages(&self) -> impl Iterator<Item = GroupPage> + '_ {
        self.by_page.keys().copied()
    }

    /// Returns the number of nodes.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        assert_eq!(self.nodes.len(), self.by_tokens.len());
        self.nodes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(first: u32) -> PageTokens {
        std::array::from_fn(|index| first + index as u32)
    }

    /// Returns a tree of `a - b - c` and `a - d`, pages numbered in that order.
    fn tree() -> (PrefixTree, [NodeId; 4]) {
        let mut tree = PrefixTree::default();
        let a = tree.insert(ParentNode::Root(Namespace::default()), &tokens(0), &[0, 10]).unwrap();
        let b = tree.insert(ParentNode::Node(a), &tokens(1), &[1, 11]).unwrap();
        let c = tree.insert(ParentNode::Node(b), &tokens(2), &[2, 12]).unwrap();
        let d = tree.insert(ParentNode::Node(a), &tokens(3), &[3, 13]).unwrap();
        (tree, [a, b, c, d])
    }

    #[test]
    fn nodes_are_found_by_parent_tokens_and_namespace() {
        let (mut tree, [a, b, ..]) = tree();
        assert_eq!(tree.find(ParentNode::Root(Namespace::default()), &tokens(0)), Some(a));
        assert_eq!(tree.find(ParentNode::Node(a), &tokens(1)), Some(b));
        assert_eq!(tree.find(ParentNode::Root(Namespace::default()), &tokens(1)), None);
        let namespaces = [
            Namespace { salt: Some("tenant".into()), adapter: None },
            Namespace { salt: None, adapter: Some([1; 32]) },
            Namespace { salt: None, adapter: Some([2; 32]) },
            Namespace { salt: Some("tenant".into()), adapter: Some([1; 32]) },
        ];
        for (namespace, page) in namespaces.into_iter().zip(4..) {
            let first = ParentNode::Root(namespace);
            assert_eq!(tree.find(first.clone(), &tokens(0)), None);
            let other = tree.insert(first.clone(), &tokens(0), &[page, 10 + page]).unwrap();
            assert_eq!(tree.find(first, &tokens(0)), Some(other));
            assert_ne!(other, a);
        }
    }

    #[test]
    fn removing_a_node_removes_its_descendants() {
        let (mut tree, [a, b, c, d]) = tree();
        let mut evicted = tree.remove_page((0, 1), true);
        evicted.sort_unstable();
        assert_eq!(evicted, [(0, 2), (1, 11), (1, 12)]);
        assert_eq!((tree.len(), tree.find(ParentNode::Node(a), &tokens(1))), (2, None));
        assert_eq!(tree.insert(ParentNode::Node(b), &tokens(2), &[2, 12]), None);
        assert!(tree.remove(c).is_empty());
        assert_eq!(tree.find(ParentNode::Node(a), &tokens(3)), Some(d));
    }

    #[test]
    fn a_node_without_pages_stays_while_it_has_children() {
        let (mut tree, [a, b, c, _]) = tree();
        tree.remove_page((0, 1), false);
        tree.remove_page((1, 11), false);
        assert_eq!(tree.pages(b), [PAGE_NONE; 2]);
        assert_eq!(tree.find(ParentNode::Node(b), &tokens(2)), Some(c));
        tree.set_page(b, 1, 21);
        assert_eq!(tree.pages(b), [PAGE_NONE, 21]);
        tree.remove_page((1, 21), false);
        for page in [(0, 2), (1, 12)] {
            tree.remove_page(page, false);
        }
        assert_eq!(tree.find(ParentNode::Node(a), &tokens(1)), None);
        assert_eq!(tree.len(), 2);
        for page in [(0, 0), (1, 10), (0, 3), (1, 13)] {
            tree.remove_page(page, false);
        }
        assert_eq!((tree.len(), tree.all_pages().count()), (0, 0));
    }
}
