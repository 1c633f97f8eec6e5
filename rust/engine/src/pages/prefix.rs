//! Which pages hold what, by the tokens that led there: a radix tree with a page of tokens on every edge.
//!
//! A node stands for all tokens from the beginning of a sequence to the end of one page. It is found by its parent and
//! by the tokens themselves, compared one by one: no hash can collide. Sequences of different namespaces never meet.
//!
//! A node names one page of every group of layers. Where all earlier tokens are looked back upon, a page without those
//! before it is of no use, so that a node goes with its page there and takes what is behind it along. Groups with a
//! window lose pages one by one; then the node stays, and ends at which the window is whole can still be continued.

use std::collections::HashMap;
use std::sync::Arc;

use ferrule_kernels::kv::{PAGE_TOKENS, PageId};
use ferrule_model::Adapter;

use super::PAGE_NONE;

/// The tokens of a page.
pub(crate) type PageTokens = [u32; PAGE_TOKENS];

/// What separates requests that must not share pages although their tokens are the same.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Namespace {
    /// A tenant's.
    pub salt: Option<Arc<str>>,
    /// The fingerprint of what is added to the model.
    pub adapter: Option<[u8; 32]>,
}

impl Namespace {
    /// Of sequences with this salt and this adapter.
    pub fn new(salt: Option<Arc<str>>, adapter: Option<&Adapter>) -> Self {
        Self { salt, adapter: adapter.map(|adapter| *adapter.fingerprint()) }
    }
}

/// A node of the tree. Never used again for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(u64);

/// Where a node hangs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum ParentNode {
    /// It is the first page of a sequence.
    Root(Namespace),
    /// It comes after another.
    Node(NodeId),
}

#[derive(Debug)]
struct Node {
    place: ParentNode,
    tokens: PageTokens,
    /// For each group its page, or [`PAGE_NONE`].
    pages: Vec<PageId>,
    children: Vec<NodeId>,
}

/// A page of a group.
pub(crate) type GroupPage = (usize, PageId);

/// The tree.
#[derive(Debug, Default)]
pub(crate) struct PrefixTree {
    nodes: HashMap<NodeId, Node>,
    by_tokens: HashMap<(ParentNode, PageTokens), NodeId>,
    /// The node of every page that a node names.
    by_page: HashMap<GroupPage, NodeId>,
    next: u64,
}

impl PrefixTree {
    /// The node of these tokens in that place.
    pub fn find(&self, place: ParentNode, tokens: &PageTokens) -> Option<NodeId> {
        self.by_tokens.get(&(place, *tokens)).copied()
    }

    /// Whether a node is still there.
    pub fn contains(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    /// The pages of a node, one of each group or [`PAGE_NONE`].
    pub fn pages(&self, node: NodeId) -> &[PageId] {
        &self.nodes[&node].pages
    }

    /// Enters pages under their tokens; none if the node that they come after is gone.
    ///
    /// # Panics
    /// If the tokens have a node there.
    pub fn insert(&mut self, place: ParentNode, tokens: &PageTokens, pages: &[PageId]) -> Option<NodeId> {
        let id = NodeId(self.next);
        if let ParentNode::Node(parent) = place {
            self.nodes.get_mut(&parent)?.children.push(id);
        }
        self.next += 1;
        let known = self.by_tokens.insert((place.clone(), *tokens), id);
        assert!(known.is_none(), "the same tokens twice");
        self.nodes.insert(id, Node { place, tokens: *tokens, pages: vec![PAGE_NONE; pages.len()], children: vec![] });
        for (group, &page) in pages.iter().enumerate().filter(|&(_, &page)| page != PAGE_NONE) {
            self.set_page(id, group, page);
        }
        Some(id)
    }

    /// Gives a node a page of a group that it has none of.
    ///
    /// # Panics
    /// If the node is gone.
    pub fn set_page(&mut self, node: NodeId, group: usize, page: PageId) {
        self.nodes.get_mut(&node).expect("the node is there").pages[group] = page;
        self.by_page.insert((group, page), node);
    }

    /// Takes a page out, and with `wholly` the node that names it and everything behind that; the other pages that are
    /// named no more.
    pub fn remove_page(&mut self, page: GroupPage, wholly: bool) -> Vec<GroupPage> {
        let Some(id) = self.by_page.remove(&page) else { return Vec::new() };
        let node = self.nodes.get_mut(&id).expect("a page's node is there");
        node.pages[page.0] = PAGE_NONE;
        if wholly {
            return self.remove(id);
        }
        self.prune(id);
        Vec::new()
    }

    /// Takes a node out with everything behind it; the pages that are named no more.
    pub fn remove(&mut self, id: NodeId) -> Vec<GroupPage> {
        let mut pages = Vec::new();
        let mut left = vec![id];
        let parent = self.nodes.get(&id).map(|node| node.place.clone());
        while let Some(id) = left.pop() {
            let Some(node) = self.nodes.remove(&id) else { continue };
            self.by_tokens.remove(&(node.place, node.tokens));
            left.extend(node.children);
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

    /// Removes a node that names no page and leads nowhere, then its parent if the same is true of it.
    pub fn prune(&mut self, mut id: NodeId) {
        while let Some(node) = self.nodes.get(&id) {
            if !node.children.is_empty() || node.pages.iter().any(|&page| page != PAGE_NONE) {
                return;
            }
            let place = node.place.clone();
            self.by_tokens.remove(&(place.clone(), node.tokens));
            self.nodes.remove(&id);
            let ParentNode::Node(parent) = place else { return };
            if let Some(node) = self.nodes.get_mut(&parent) {
                node.children.retain(|&child| child != id);
            }
            id = parent;
        }
    }

    /// Every page that a node names.
    pub fn all_pages(&self) -> impl Iterator<Item = GroupPage> + '_ {
        self.by_page.keys().copied()
    }

    /// Nodes of the tree.
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

    /// A tree of `a - b - c` and `a - d`, pages numbered in that order.
    fn tree() -> (PrefixTree, [NodeId; 4]) {
        let mut tree = PrefixTree::default();
        let a = tree.insert(ParentNode::Root(Namespace::default()), &tokens(0), &[0, 10]).unwrap();
        let b = tree.insert(ParentNode::Node(a), &tokens(1), &[1, 11]).unwrap();
        let c = tree.insert(ParentNode::Node(b), &tokens(2), &[2, 12]).unwrap();
        let d = tree.insert(ParentNode::Node(a), &tokens(3), &[3, 13]).unwrap();
        (tree, [a, b, c, d])
    }

    #[test]
    fn nodes_are_found_by_place_tokens_and_namespace() {
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
    fn a_node_takes_along_what_is_behind_it() {
        let (mut tree, [a, b, c, d]) = tree();
        let mut gone = tree.remove_page((0, 1), true);
        gone.sort_unstable();
        assert_eq!(gone, [(0, 2), (1, 11), (1, 12)]);
        assert_eq!((tree.len(), tree.find(ParentNode::Node(a), &tokens(1))), (2, None));
        assert_eq!(tree.insert(ParentNode::Node(b), &tokens(2), &[2, 12]), None);
        assert!(tree.remove(c).is_empty());
        assert_eq!(tree.find(ParentNode::Node(a), &tokens(3)), Some(d));
    }

    #[test]
    fn a_node_without_pages_stays_while_it_leads_somewhere() {
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
